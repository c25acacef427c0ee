//! Memory on the devices of a context.

use super::argument::Out;
use super::context::find;
use super::guard::{Failure, guard};
use super::stream::stream_of;
use super::types::*;
use mpgpu_contexts::{Context, Error};
use mpgpu_core::topology::DeviceId;
use std::ffi::c_void;

/// Allocates `bytes` bytes on `device`.
///
/// On a GPU this is GPU memory, which other processes can map. On a host domain it is pinned memory that GPUs read and
/// write directly; on CUDA larger buffers are spread over the sockets (docs/guide/gpus.md). For host memory that other
/// processes can map, use `mp_alloc_shared`. `*memory` is aligned to at least 256 bytes and its contents are undefined.
/// The caller owns it until `mp_free`; destroying the context frees it too. The program can access GPU memory of the
/// host backend, but not of CUDA. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_INVALID_DEVICE`, `MP_ERROR_INVALID_ARGUMENT` for 0 bytes or NULL
/// `memory`, `MP_ERROR_OUT_OF_MEMORY`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_alloc(context: mp_context_t, device: i32, bytes: u64, memory: *mut *mut c_void) -> mp_status_t {
    allocate(context, bytes, memory, |context| context.allocate(DeviceId(device), bytes))
}

/// Allocates memory that other processes can map (`mp_memory_export`), otherwise as `mp_alloc`. Free it with `mp_free`.
/// May be called from any thread.
///
/// Other processes can map host memory only from this function. On CUDA the host memory of `mp_alloc` is in huge pages,
/// which few systems provide for shared memory. The host memory of this function is zeroed, and each allocation uses a
/// file descriptor. On CUDA, allocations of 4 MiB or more have all pages resident when the call returns. The pages are
/// spread over the sockets, or are on the NUMA node of the host domain `device`.
///
/// GPU memory is allocated in multiples of 2 MiB. Other processes can map it even if another library, for example UCX
/// inside MPI, has opened it. MPI itself moves memory of `mp_alloc` faster.
///
/// Errors: the errors of `mp_alloc`; `MP_ERROR_NOT_SUPPORTED` if the system provides no memory file, or no file
/// descriptor is left (`ulimit -n`).
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

/// Frees memory of `mp_alloc`. Waits until all work that the context has enqueued so far has finished, as `cudaFree`
/// does; work that a stream captures does not count. Plans that use the memory can no longer be executed. NULL does
/// nothing.
///
/// May be called from any thread, but not from a host function. As with `cudaFree`, no other thread may enqueue work
/// that uses the memory during the call.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_POINTER` if `mp_alloc` of this context did not return `memory`,
/// or if it was already freed.
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

/// Frees memory of `mp_alloc` after all work that is now enqueued in `stream`, without waiting for it. As with
/// `cudaFreeAsync`, work of other streams that uses the memory must be ordered before that, for example by events.
///
/// The memory counts as freed when the call returns: plans that use it, and handles of it, are rejected. The driver
/// gets its bytes back later, which may wait for the GPU: in a later `mp_free` or `mp_context_destroy`, or if an
/// `mp_alloc` finds no free memory; on the host backend in the next allocation. NULL does nothing. May be called from
/// any thread, but not from a host function.
///
/// Errors, after which the caller still owns the memory: `MP_ERROR_INVALID_HANDLE` for context or stream;
/// `MP_ERROR_INVALID_POINTER` as for `mp_free`; `MP_ERROR_NOT_SUPPORTED` while `stream` is being captured.
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

/// Pins `bytes` bytes of the program's own host memory at `pointer`, for example an array, a mapped file or memory of
/// another library. Plans made from now on copy from and to this memory directly, over all links.
///
/// The caller keeps ownership of the memory. Until `mp_memory_unregister`, the memory must stay mapped and no other
/// memory may be mapped at its address, because copies keep using the pinned pages. Read-only memory can be a source if
/// the driver pins such memory.
///
/// Blocks: threads make all pages resident, in huge pages if `huge_pages` is 1 and the system supports them, and pin
/// the range in pieces that end at multiples of 1 GiB. Time per GiB on two H200 (2026-11-27): 85 ms to make pages
/// resident (48 ms in huge pages) and 33 ms (22 ms) to pin. A copy that spans several pieces counts as several
/// transfers of its plan. A window of a node plan must be within one piece. Other processes cannot map such memory.
/// Whole pages are pinned. May be called from any thread, but not from a host function.
///
/// Errors, after which nothing is pinned:
/// - `MP_ERROR_INVALID_ARGUMENT` for 0 bytes, or if `huge_pages` is neither 0 nor 1.
/// - `MP_ERROR_INVALID_POINTER` for NULL, and if the range contains memory of the context, memory of the driver, or
///   unmapped addresses.
/// - `MP_ERROR_NOT_SUPPORTED` for memory that another library has pinned or that the driver cannot pin.
/// - `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_OUT_OF_MEMORY`, `MP_ERROR_DRIVER`.
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

/// Unpins memory that `mp_memory_register` pinned. Waits until all work that the context has enqueued so far has
/// finished. Plans that use the memory can no longer be executed. Plans made afterwards treat it as pageable memory.
/// NULL does nothing.
///
/// May be called from any thread, but not from a host function. As with `mp_free`, no other thread may enqueue work
/// that uses the memory during the call.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_POINTER` if this context has not registered memory that begins
/// at `pointer`; `MP_ERROR_DRIVER`, after which the memory counts as unregistered.
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
