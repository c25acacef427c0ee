//! Memory of a context's devices.

use super::argument::Out;
use super::context::find;
use super::guard::{Failure, guard};
use super::types::*;
use crate::topology::DeviceId;
use std::ffi::c_void;

/// Allocates `bytes` bytes on `device`: on a GPU its memory, on a host domain memory that GPUs read and write directly
/// (pinned; on CUDA larger buffers are spread over the sockets, docs/cuda.md). `*memory` is aligned to at least 256
/// bytes, its contents are undefined. It belongs to the caller until `mp_free`, and to the context when that is
/// destroyed. On the host backend a GPU's memory is host memory and can be read and written by the program; on CUDA it
/// cannot. Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_DEVICE`; `MP_ERROR_INVALID_ARGUMENT` for 0 bytes or `memory`
/// NULL; `MP_ERROR_OUT_OF_MEMORY`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_alloc(context: mp_context_t, device: i32, bytes: u64, memory: *mut *mut c_void) -> mp_status_t {
    guard(|| {
        let out = Out::new(memory, c"memory")?;
        let context = find(context)?;
        if bytes == 0 {
            return Err(Failure::argument(mp_status_t::MP_ERROR_INVALID_ARGUMENT, c"bytes", "bytes=0: must be 1 or more"));
        }
        let address = context.allocate(DeviceId(device), bytes)?;
        out.write(std::ptr::with_exposed_provenance_mut(address as usize));
        Ok(())
    })
}

/// Gives memory of `mp_alloc` back. Waits until all work that the context has enqueued so far has finished, as
/// `cudaFree` does; what a stream captures has not run and is left alone. Plans that use the memory can no longer be
/// executed. NULL is allowed and does nothing. Any thread, host functions excepted; no other thread may enqueue work that
/// uses the memory while the call runs, as with `cudaFree`.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_POINTER` when `mp_alloc` of this context did not return
/// `memory`, or when it was freed already.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_free(context: mp_context_t, memory: *mut c_void) -> mp_status_t {
    guard(|| {
        let context = find(context)?;
        if memory.is_null() {
            return Ok(());
        }
        context.free(memory.addr() as u64).map_err(Failure::blame(c"memory"))
    })
}
