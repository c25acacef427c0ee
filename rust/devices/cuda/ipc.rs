//! Memory of another process that is mapped by CUDA IPC.
//!
//! Such a mapping belongs to the GPU in whose context it was opened, and lies at another address for each. For the driver it is memory
//! of that GPU. Kernels of others fault there, and copies that others issue to it start late: 8 bytes from GPU 0 to memory on GPU 1 took
//! 18.5 us where it was opened through GPU 1, and 8.7 us where it was opened through GPU 0 (one way, signal included; two H200, driver
//! 580). So memory is opened through each GPU that works on it, when a plan first has it do so, and every lane uses the address of its
//! own GPU. The address that an import returns is that of one of them ([`Gpus::mapping_gpu`]).

use super::chunk::is;
use super::driver::{CUdeviceptr, OutsideCapture, call_optional, code};
use super::gpus::Gpus;
use crate::backend::BackendError;
use crate::backend::PAYLOAD_BYTES;
use cudarc::driver::sys;
use smallvec::SmallVec;
use std::ffi::c_uint;

/// An allocation of another process.
#[derive(Debug)]
pub(super) struct Opened {
    pub payload: [u8; PAYLOAD_BYTES],
    /// The GPU that has the memory.
    pub owner: usize,
    /// Each GPU that it was opened through, and the address there; the first is the one that the import has returned. `None` where the
    /// driver would not: the exporter may have freed the memory, which whoever uses it will be told.
    pub through: SmallVec<[(usize, Option<u64>); 2]>,
    /// The program has opened it through the first, and closes that one itself.
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
    // SAFETY: the output is valid for the call; a handle that is none is refused by the driver.
    let opened = unsafe { call_optional!(gpus.driver, cuIpcOpenMemHandle(&mut base, ipc, LAZY_ENABLE_PEER_ACCESS)) };
    opened.map(|()| base).map_err(|error| if is(&error, code::ALREADY_MAPPED) { opened_by_another(gpu, &error) } else { error })
}

fn opened_by_another(gpu: usize, error: &BackendError) -> BackendError {
    BackendError::NotSupported(format!(
        "memory of another process cannot be opened through GPU {gpu}: another library of this process, for instance UCX within MPI, has this \
         allocation open, or memory that was freed and lay there ({error}); keep allocations that MPI has sent until the program \
         ends, or allocate as memory shared between processes what MPI does not send"
    ))
}

/// Closes all of it. Whoever closes vouches that work which uses it has finished.
pub(super) fn close(gpus: &Gpus, opened: &Opened) -> Result<(), BackendError> {
    let mut result = Ok(());
    for (gpu, base) in opened.through.iter().skip(usize::from(opened.is_adopted)).filter_map(|&(gpu, base)| Some((gpu, base?))) {
        // Whatever became of the others.
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
    // Tried twice: nobody else would close it, and only this context can.
    let _current = primary.enter().or_else(|_| primary.enter())?;
    // SAFETY: opened through this GPU.
    unsafe { call_optional!(gpus.driver, cuIpcCloseMemHandle(base)) }
}
