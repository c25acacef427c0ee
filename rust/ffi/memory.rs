//! Memory of a context's devices.

use super::argument::Out;
use super::context::find;
use super::guard::{Failure, guard};
use super::stream::stream_of;
use super::types::*;
use mpgpu_contexts::{Context, Error};
use mpgpu_core::topology::DeviceId;
use std::ffi::c_void;

/// Allocates `bytes` bytes on `device`: on a GPU its memory, on a host domain memory that GPUs read and write directly
/// (pinned; on CUDA larger buffers are spread over the sockets, docs/guide/gpus.md). Other processes can map that of a GPU;
/// host memory for them is `mp_alloc_shared`'s. `*memory` is aligned to at least 256 bytes, its contents are undefined. It belongs to the caller until `mp_free`, and to the context when that is
/// destroyed. On the host backend a GPU's memory is host memory and can be read and written by the program; on CUDA it
/// cannot. Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_DEVICE`; `MP_ERROR_INVALID_ARGUMENT` for 0 bytes or `memory`
/// NULL; `MP_ERROR_OUT_OF_MEMORY`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_alloc(context: mp_context_t, device: i32, bytes: u64, memory: *mut *mut c_void) -> mp_status_t {
    allocate(context, bytes, memory, |context| context.allocate(DeviceId(device), bytes))
}

/// As `mp_alloc`, and other processes can map the memory (`mp_memory_export`). Of host memory they can map no other: that of
/// `mp_alloc` is in huge pages on CUDA, which few systems give to memory that processes share. On a GPU the memory takes
/// whole multiples of 2 MiB, and others can map it whatever another library, as UCX within MPI, has open; MPI itself moves
/// memory of `mp_alloc` faster. Host memory is zero, and each
/// allocation of it takes a file descriptor; on CUDA, from 4 MiB on, its pages are resident when the call returns, spread
/// over the sockets or on the NUMA node of the host domain `device`. Freed by `mp_free`. Any thread.
///
/// Errors: as `mp_alloc`; `MP_ERROR_NOT_SUPPORTED` where the system gives no memory file, or no descriptor is left for
/// it (`ulimit -n`).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_alloc_shared(context: mp_context_t, device: i32, bytes: u64, memory: *mut *mut c_void) -> mp_status_t {
    allocate(context, bytes, memory, |context| context.allocate_shared(DeviceId(device), bytes))
}

fn allocate(context: mp_context_t, bytes: u64, memory: *mut *mut c_void, from: impl FnOnce(&Context) -> Result<u64, Error>) -> mp_status_t {
    guard(|| {
        let out = Out::new(memory, c"memory")?;
        let context = find(context)?;
        if bytes == 0 {
            return Err(Failure::invalid(c"bytes", "bytes=0: must be 1 or more"));
        }
        out.write(std::ptr::with_exposed_provenance_mut(from(&context)? as usize));
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

/// Gives memory of `mp_alloc` back after all work that is enqueued in `stream` now, without waiting for it. Work of other
/// streams that uses the memory must come before that, by events say, as with `cudaFreeAsync`.
///
/// From now on the memory counts as freed: plans that use it, and handles of it, are refused. Its bytes go back to the
/// driver, which may wait for the GPU to do so, in a later `mp_free` or `mp_context_destroy`, or when an `mp_alloc` finds
/// no memory left; on the host backend with the next allocation. NULL is allowed and does nothing. Any thread, host
/// functions excepted.
///
/// Errors, after which the memory is still the caller's: `MP_ERROR_INVALID_HANDLE` for context or stream;
/// `MP_ERROR_INVALID_POINTER` as `mp_free`; `MP_ERROR_NOT_SUPPORTED` while `stream` is being captured.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_free_async(context: mp_context_t, memory: *mut c_void, stream: mp_stream_t) -> mp_status_t {
    guard(|| {
        let context = find(context)?;
        if memory.is_null() {
            return Ok(());
        }
        Ok(context.free_async(memory.addr() as u64, stream_of(stream))?)
    })
}

/// Pins `bytes` bytes of the program's own host memory at `pointer`, an array, a mapped file or memory of another library, so
/// that copies of plans that are made from now on read and write it where it lies, over all links. It stays the caller's, who
/// keeps it mapped, and does not map other memory there, until `mp_memory_unregister`: copies go on with the pages that were
/// pinned. Memory that may not be written can be a source, where the driver pins such memory.
///
/// Blocks: threads bring all pages in, in huge pages where `huge_pages` is 1 and the system has them, and pin pieces that end
/// where addresses are multiples of 1 GiB. Two H200 (2026-11-27), for each GiB: 85 ms for pages that are not there yet (48 in
/// huge pages), and 33 ms (22) to pin. What a copy takes of several pieces counts as several transfers of its plan. Windows of
/// node plans lie within a piece; other processes cannot map such memory. Whole pages are pinned. Any thread, host functions
/// excepted.
///
/// Errors, after which nothing is pinned: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` for 0 bytes, or
/// `huge_pages` neither 0 nor 1; `MP_ERROR_INVALID_POINTER` for NULL, and where memory of the context, of the driver or
/// none is in the range; `MP_ERROR_NOT_SUPPORTED` for memory that another library has pinned or that the driver does not pin;
/// `MP_ERROR_OUT_OF_MEMORY`; `MP_ERROR_DRIVER`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_memory_register(context: mp_context_t, pointer: *mut c_void, bytes: u64, huge_pages: i32) -> mp_status_t {
    guard(|| {
        let context = find(context)?;
        if bytes == 0 {
            return Err(Failure::invalid(c"bytes", "bytes=0: must be 1 or more"));
        }
        if !(0..=1).contains(&huge_pages) {
            return Err(Failure::invalid(c"huge_pages", format!("huge_pages={huge_pages}: must be 0 or 1")));
        }
        context.register_memory(pointer.addr() as u64, bytes, huge_pages == 1).map_err(Failure::blame(c"pointer"))
    })
}

/// Takes `mp_memory_register` back. Waits until all work that the context has enqueued so far has finished. Plans that use the
/// memory can no longer be executed; plans that are made afterwards take it for ordinary memory. NULL is allowed and does
/// nothing. Any thread, host functions excepted; as for `mp_free`, no other thread enqueues work that uses it meanwhile.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_POINTER` when this context has not registered memory that begins at
/// `pointer`; `MP_ERROR_DRIVER`, after which it counts as unregistered.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_memory_unregister(context: mp_context_t, pointer: *mut c_void) -> mp_status_t {
    guard(|| {
        let context = find(context)?;
        if pointer.is_null() {
            return Ok(());
        }
        context.unregister_memory(pointer.addr() as u64).map_err(Failure::blame(c"pointer"))
    })
}
